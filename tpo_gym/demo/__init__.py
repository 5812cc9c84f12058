"""The main job: TPO beside GRPO and PPO on two real tasks. Run it with ``python -m tpo_gym.demo`` or ``make demo``.

``jobs`` says what is run and carries out one run, ``workers`` spreads the runs over processes, ``display`` shows how
far they are, ``report`` writes the table, the figure and the curves.
"""
