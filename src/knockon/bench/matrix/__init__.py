"""The matrix: methods × workloads × concurrencies × repeats, a fresh server for each cell.

``settings``, ``methods``, ``workloads`` and ``cells`` say what is measured; ``leash`` and
``server`` hold a server process, ``measure`` one cell, ``batch`` those whose servers stand side by
side, ``folder`` what is finished, ``run`` the whole, ``progress`` who is told. The report lies in
``report``.
"""
