"""Where the method's gain comes from, on token sequences: section 4, appendices D and E."""

from __future__ import annotations

from tpo_gym.experiments.experiment import Claim, Experiment, Figure, Method, Panel, table
from tpo_gym.experiments.tokens import (
    DENSE_BASE,
    EXACT_MATCH,
    GRPO,
    PROMPT_VARIATIONS,
    QUICK_TERMINAL,
    SHORT,
    TERMINAL_BASE,
    TERMINAL_METHODS,
    TOKEN_ERROR,
    TPO,
    single_sample,
)

_WIDE = TERMINAL_BASE.change({"batch": 256, "group_size": 32, "env": {"sequence_length": 8}})
# At the scale "quick" these are the runs of `terminal`, where they can be.
_SMALL = {**QUICK_TERMINAL, "group_size": 8, "env": {"sequence_length": 4}}

MECHANISM = Experiment(
    name="mechanism",
    title="Gradients and weights under terminal reward",
    section="4",
    base=_WIDE,
    methods=(
        Method("TPO", {"algorithm": "TPO"}),
        Method("TPO (1 epoch)", {"algorithm": "TPO", "epochs": 1}),
        *TERMINAL_METHODS[1:],
    ),
    seeds=10,
    claims=(
        Claim("", "TPO", "at", 0.002, where=400),
        Claim("", "TPO (1 epoch)", "at", 0.011, where=400),
        Claim("", "GRPO", "final", 0.127),
        Claim("", "DG", "final", 0.14),
    ),
    figures=(
        Figure(
            "10",
            "metrics",
            ("gradient_norm", "success_weight", "failure_weight"),
            methods=("TPO", "TPO (1 epoch)", "GRPO"),
            smooth=50,
            caption="H=8, V=2, K=32, B=256. Norm of the first epoch's gradient; mean target mass (TPO) or |A| (GRPO) "
            "of successful and failed candidates.",
        ),
        Figure(
            "11",
            "metrics",
            ("all_fail", "prompts_with_success"),
            methods=("TPO", "TPO (1 epoch)", "GRPO", "GRPO (no KL)"),
            smooth=50,
            caption="Groups in which all candidates fail; prompts with at least one success.",
        ),
        Figure(
            "14",
            "metrics",
            ("error", "gradient_norm"),
            methods=("TPO", "TPO (1 epoch)", "DG", "PPO"),
            log=True,
            smooth=50,
            caption="Four epochs or one.",
        ),
    ),
    quick={"seeds": 1, "changes": _SMALL},
    metric_labels={
        **EXACT_MATCH,
        "gradient_norm": "gradient norm, first epoch",
        "success_weight": "weight of successes",
        "failure_weight": "weight of failures",
        "all_fail": "groups that all fail",
        "prompts_with_success": "prompts with a success",
    },
)
GROUP_SIZE = Experiment(
    name="group_size",
    title="Candidates per group",
    section="4",
    base=_WIDE,
    methods=(TPO, GRPO),
    panels=tuple(Panel(f"K={k}", {"group_size": k}) for k in (4, 8, 16, 32, 64)),
    seeds=30,
    claims=table(
        ("K=4", "K=8", "K=16", "K=32", "K=64"),
        "final",
        {"TPO": (8.9, 5.2, 5.1, 2.6, 0.36), "GRPO": (19.4, 19.8, 9.2, 4.4, 5.6)},
        0.01,
    ),
    figures=(Figure("12", "sweep", smooth=20, caption="H=8, V=2, B=256, 4 epochs."),),
    quick={
        "seeds": 1,
        "panels": tuple(Panel(f"K={k}", {"group_size": k}) for k in (4, 8, 16)),
        "changes": {name: value for name, value in _SMALL.items() if name != "group_size"},
    },
    metric_labels=EXACT_MATCH,
)

MASKING = Experiment(
    name="masking",
    title="Leaving out groups without variance",
    section="4",
    base=_WIDE,
    methods=(
        TPO,
        GRPO,
        Method("GRPO (masked)", {"algorithm": "GRPO", "arguments": {"mask_zero_variance": True}}),
    ),
    seeds=30,
    claims=(
        Claim("", "TPO", "final", 0.0005),
        Claim("", "GRPO", "final", 0.063),
        Claim("", "GRPO (masked)", "final", 0.297),
    ),
    figures=(Figure("13", "panels", smooth=20, caption="H=8, V=2, K=32, B=256, 4 epochs."), Figure("13b", "bars")),
    quick={"seeds": 1, "changes": _SMALL},
    metric_labels=EXACT_MATCH,
)

EPOCHS = Experiment(
    name="epochs",
    title="Epochs per rollout batch",
    section="4",
    base=_WIDE,
    methods=(TPO, GRPO),
    panels=tuple(Panel(f"epochs={n}", {"epochs": n}) for n in (1, 2, 4, 8, 16)),
    seeds=30,
    claims=table(
        tuple(f"epochs={n}" for n in (1, 2, 4, 8, 16)),
        "final",
        {"TPO": (0.02, "<2.3", 0.05, "<2.3", "<2.3"), "GRPO": (4.3, 37.6, 6.3, 3.3, 1.1)},
        0.01,
    ),
    figures=(Figure("15", "sweep", smooth=20, caption="H=8, V=2, K=32, B=256."),),
    quick={
        "seeds": 1,
        "panels": tuple(Panel(f"epochs={n}", {"epochs": n}) for n in (1, 4, 8)),
        "changes": _SMALL,
    },
    metric_labels=EXACT_MATCH,
)

_ETAS = (0.25, 0.5, 1.0, 2.0, 4.0)
TEMPERATURE = Experiment(
    name="temperature",
    title="Temperature of the target",
    section="D",
    base=DENSE_BASE,
    methods=(TPO,),
    panels=tuple(Panel(f"η={eta:g}", {"arguments": {"eta": eta}} if eta != 1 else {}) for eta in _ETAS),
    seeds=10,
    claims=table(tuple(f"η={eta:g}" for eta in _ETAS), "steps", {"TPO": (72, 67, 96, 141, 260)})
    + table(tuple(f"η={eta:g}" for eta in _ETAS), "final", {"TPO": (1.0, 0.0, 0.7, 1.0, 0.8)}, 0.01),
    figures=(Figure("16", "sweep", smooth=5, caption="Reverse copy, V=2, H=10, B=100, K=8, a reward per token."),),
    quick={"seeds": 1, "changes": {**SHORT, "updates": 120}},
    metric_labels=TOKEN_ERROR,
)

_SPARSE_H5 = Panel(
    "terminal, H=5",
    {"updates": 2000, "env": {"sequence_length": 5, "reward": "terminal"}, "arguments": {"credit": "return"}},
)
_SHORT_FLIP = Panel("sequential, flip", {"task": "TokenFlip", "env": {"reward": "sequential", "sequence_length": 4}})
DG_EPOCHS = Experiment(
    name="dg_epochs",
    title="Four epochs for DG",
    section="E",
    base=DENSE_BASE.change(single_sample("own")[1].changes),
    methods=(Method("DG", {"epochs": 1}), Method("DG (4 epochs)", {"epochs": 4})),
    panels=(_SPARSE_H5, *PROMPT_VARIATIONS),
    seeds=10,
    claims=table(
        ("terminal, H=5", "sequential, flip", "sequential, reverse copy", "sequential, reverse flip"),
        "final",
        {"DG": (2.0, 0.07, 0.35, 0.0), "DG (4 epochs)": (48.3, 4.56, 0.05, 0.82)},
        0.01,
    ),
    figures=(
        Figure("17a", "panels", panels=("terminal, H=5",), smooth=20),
        Figure("17b", "bars", panels=tuple(p.label for p in PROMPT_VARIATIONS[:4]), caption="Final error, H=10, V=2."),
        Figure("17c", "bars", panels=tuple(p.label for p in PROMPT_VARIATIONS[4:]), caption="Final error, H=10, V=2."),
    ),
    notes=(
        "The paper does not give the length of the terminal task; its curves start at an error of 0.97, that is H=5.",
    ),
    quick={
        "seeds": 1,
        "panels": (_SPARSE_H5, _SHORT_FLIP),
        "changes": QUICK_TERMINAL,
    },
    metric_labels=TOKEN_ERROR,
)


EXPERIMENTS = (MECHANISM, GROUP_SIZE, MASKING, EPOCHS, TEMPERATURE, DG_EPOCHS)
