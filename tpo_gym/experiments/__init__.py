"""The paper's experiments: every table and figure recomputed beside the paper's numbers.

Run them with ``python -m tpo_gym.experiments NAME...``; ``--list`` shows the names. ``settings`` says what a run
depends on and ``experiment`` what an experiment is; ``bandits``, ``tokens`` and ``analysis`` hold the experiments as
data. ``build``, ``record`` and ``run`` carry out one run, ``workers`` and ``display`` many of them; ``statistics``,
``figures`` and ``report`` make the results.
"""
