"""From a matrix's results to tables and plots.

``results`` reads and reckons, ``sections`` says what the report holds as plain blocks (``blocks``),
``markdown`` and ``html`` write them down, ``plots`` draws.
"""
