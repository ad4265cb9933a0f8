"""``knockon bench rollout``: the stages of the tensor-parallel Domino rollout, timed.

``settings`` says what is asked for and ``run.measure`` does it, over the ranks that ``ranks``
starts, each of which holds the worker of ``rank``. ``report`` is what comes out, which ``table``
and ``plot`` show.
"""
