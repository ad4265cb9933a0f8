"""Mixed traffic for a while, then: is anything lost, kept or wrong?

``traffic`` makes the requests, ``run`` sends them and ``checks`` looks at what is left.
"""
