"""``knockon bench engine``: the engine's throughput at real sizes, without real weights.

``settings`` says what is asked for and ``run.measure`` does it: ``weights`` makes a target and its
drafters of a ``shapes`` entry, ``assemble`` puts the real engine around them with the accept
lengths of ``synthetic``, ``load`` drives it and ``trace`` says where its steps' time goes.
``report`` is what comes out, which ``table`` and ``plot`` show.
"""
