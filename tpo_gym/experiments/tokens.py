"""The comparisons of methods on token sequences (sections 3.4 to 3.7), and one of our own."""

from __future__ import annotations

from dataclasses import replace

from tpo_gym.experiments.experiment import Experiment, Figure, Method, Panel, table
from tpo_gym.experiments.settings import Changes, Settings

TERMINAL_BASE = Settings(
    "TokenReversal",
    "TPO",
    updates=2000,
    batch=100,
    group_size=8,
    epochs=4,
    env={"sequence_length": 10, "vocab_size": 2, "reward": "terminal"},
)
DENSE_BASE = TERMINAL_BASE.change({"updates": 1000, "candidates": "actions", "env": {"reward": "bag_of_tokens"}})

TPO = Method("TPO", {"algorithm": "TPO"})
GRPO = Method("GRPO", {"algorithm": "GRPO"})
GRPO_NO_KL = Method("GRPO (no KL)", {"algorithm": "GRPO", "arguments": {"beta": 0.0}})
_SINGLE: Changes = {"group_size": 1, "candidates": "episodes"}


def single_sample(credit: str) -> tuple[Method, Method]:
    """The methods without groups."""
    arguments = {"credit": credit, "baseline": "batch"}
    return (
        Method("PPO", {**_SINGLE, "algorithm": "ClippedPG", "arguments": arguments}),
        Method("DG", {**_SINGLE, "algorithm": "DG", "epochs": 1, "arguments": arguments}),
    )


_DENSE_METHODS = (TPO, GRPO, *single_sample("own"))
TERMINAL_METHODS = (TPO, GRPO, GRPO_NO_KL, *single_sample("return"))
# As many interactions as groups of 8 take: batch x K, learning rate x sqrt(K).
_INTERACTIONS: Changes = {"batch": 800, "learning_rate": 1e-3 * 8**0.5}

EXACT_MATCH = {"error": "exact-match error"}
TOKEN_ERROR = {"error": "sequence error"}
QUICK_TERMINAL = {"batch": 50, "updates": 200}
SHORT = {"batch": 50, "env": {"sequence_length": 4}}


def _lengths(lengths: tuple[int, ...]) -> tuple[Panel, ...]:
    return tuple(Panel(f"H={h}", {"env": {"sequence_length": h}}) for h in lengths)


VOCABULARY = Experiment(
    name="vocabulary",
    title="Token reversal by size of the vocabulary",
    section="3.4",
    base=DENSE_BASE,
    methods=_DENSE_METHODS,
    panels=tuple(Panel(f"V={v}", {"env": {"vocab_size": v}}) for v in (2, 4, 8, 16)),
    seeds=20,
    claims=table(
        ("V=2", "V=4", "V=8", "V=16"),
        "steps",
        {
            "TPO": (58, 74, 103, 102),
            "GRPO": (904, 141, 124, 148),
            "DG": (199, 273, 314, 393),
            "PPO": (872, 181, 191, 259),
        },
    ),
    figures=(
        Figure("5", "panels", smooth=10, caption="Reverse copy, H=10, a reward per token; 8 next-token candidates."),
    ),
    quick={
        "seeds": 1,
        "panels": tuple(Panel(f"V={v}", {"env": {"vocab_size": v}}) for v in (2, 16)),
        "changes": {**SHORT, "updates": 120},
    },
    metric_labels=TOKEN_ERROR,
)

_TARGETS = {
    "copy": "TokenCopy",
    "flip": "TokenFlip",
    "reverse copy": "TokenReversal",
    "reverse flip": "TokenReverseFlip",
}
_REWARDS = {"bag": "bag_of_tokens", "sequential": "sequential"}
PROMPT_VARIATIONS = tuple(
    Panel(f"{reward}, {target}", {"task": task, "env": {"reward": name}})
    for reward, name in _REWARDS.items()
    for target, task in _TARGETS.items()
)
# Grouped methods are the same runs in both matchings.
_INTERACTION_VARIATIONS = tuple(
    replace(panel, label=f"{panel.label}, interactions", single_sample=_INTERACTIONS) for panel in PROMPT_VARIATIONS
)
_NEVER = ("-",) * 4

VARIATIONS = Experiment(
    name="variations",
    title="Targets and rewards",
    section="3.5",
    base=DENSE_BASE,
    methods=_DENSE_METHODS,
    panels=PROMPT_VARIATIONS + _INTERACTION_VARIATIONS,
    seeds=10,
    claims=table(
        tuple(panel.label for panel in PROMPT_VARIATIONS),
        "steps",
        {
            "TPO": (81, 56, 55, 59, 295, 321, 159, 276),
            "GRPO": (338, 104, 352, 209, *_NEVER),
            "DG": (219, 201, 202, 200, 439, 349, 515, 309),
            "PPO": (170, 146, "-", 143, *_NEVER),
        },
    ),
    figures=(
        Figure(
            "6",
            "panels",
            smooth=10,
            caption='H=10, V=2. "interactions": single-sample methods with batch x 8 and learning rate x sqrt(8).',
        ),
    ),
    quick={
        "seeds": 1,
        "panels": tuple(p for p in PROMPT_VARIATIONS if p.label in ("bag, flip", "sequential, reverse copy")),
        "changes": {**SHORT, "updates": 150},
    },
    metric_labels=TOKEN_ERROR,
)

_PROMPTS = _lengths((7, 8, 9, 10))
_MATCHINGS = tuple(replace(p, label=f"prompts, {p.label}") for p in _PROMPTS) + tuple(
    replace(p, label=f"interactions, {p.label}", single_sample=_INTERACTIONS) for p in _PROMPTS
)
_QUICK_LENGTHS = _lengths((4, 5))

TERMINAL = Experiment(
    name="terminal",
    title="Terminal reward",
    section="3.6",
    base=TERMINAL_BASE,
    methods=TERMINAL_METHODS,
    panels=_MATCHINGS,
    seeds=20,
    claims=table(
        tuple(panel.label for panel in _MATCHINGS),
        "final",
        {
            "TPO": (6.9, 8.6, 6.1, 7.4, 1.8, 2.8, 5.3, 19.0),
            "GRPO": (14.5, 27.6, 30.0, 50.4, 9.6, 23.2, 36.2, 48.7),
            "GRPO (no KL)": (66.6, 92.5, ">95", ">95", 78.1, 83.8, ">95", ">95"),
            "PPO": (12.0, 26.3, 90.6, ">95", 38.6, 62.1, 66.2, ">95"),
            "DG": (33.8, 58.8, ">95", ">95", 47.7, 69.4, ">95", ">95"),
        },
        0.01,
    ),
    figures=(
        Figure(
            "7",
            "panels",
            smooth=20,
            caption="Reverse copy, V=2, reward 1 only if every token is right. Top: 100 prompts for every method; "
            "bottom: 800 rollouts for every method.",
        ),
    ),
    notes=(
        "Grouped methods have the same settings in both matchings, so the same runs stand in both halves; the paper's "
        "two numbers for them differ, which shows how far 20 seeds scatter.",
    ),
    quick={
        "seeds": 1,
        "panels": tuple(replace(p, label=f"prompts, {p.label}") for p in _QUICK_LENGTHS),
        "changes": QUICK_TERMINAL,
    },
    metric_labels=EXACT_MATCH,
)

ABLATIONS = Experiment(
    name="ablations",
    title="Anchor and target matching",
    section="3.7",
    base=TERMINAL_BASE,
    methods=(
        TPO,
        Method("TPO (no anchor)", {"algorithm": "TPO", "arguments": {"anchor": "none"}}),
        Method("Group PG", {"algorithm": "GroupPG"}),
        GRPO_NO_KL,
    ),
    panels=_lengths((7, 8, 10)),
    seeds=20,
    claims=table(
        ("H=7", "H=8", "H=10"),
        "final",
        {
            "TPO": (6.9, 8.6, 7.4),
            "TPO (no anchor)": ("", "", ">99"),
            "Group PG": ("", "", ">99"),
            "GRPO (no KL)": (66.6, 92.5, ">99"),
        },
        0.01,
    ),
    figures=(Figure("8", "panels", smooth=20, caption="Terminal reward, reverse copy, V=2, K=8, B=100."),),
    quick={"seeds": 1, "panels": _QUICK_LENGTHS[:1], "changes": QUICK_TERMINAL},
    metric_labels=EXACT_MATCH,
)


def _anchored(label: str, anchor: str, decay: bool) -> Method:
    return Method(label, {"algorithm": "TPO", "decay": decay, "arguments": {"anchor": anchor}})


_ANCHOR_PANELS = tuple(replace(p, changes={**p.changes, "updates": 500}) for p in _lengths((7, 8, 10))) + tuple(
    replace(p, changes={**p.changes, "updates": 900}) for p in _lengths((12,))
)
ANCHOR = Experiment(
    name="anchor",
    title="Ours: anchor and learning-rate decay",
    section="",
    base=TERMINAL_BASE,
    methods=(
        TPO,
        Method("TPO, decay", {"algorithm": "TPO", "decay": True}),
        _anchored("TPO ratio", "ratio", False),
        _anchored("TPO ratio, decay", "ratio", True),
        GRPO,
        Method("GRPO, decay", {"algorithm": "GRPO", "decay": True}),
    ),
    panels=_ANCHOR_PANELS,
    seeds=5,
    figures=(
        Figure(
            "ours",
            "panels",
            log=True,
            smooth=10,
            caption='anchor="old" (the paper\'s) and "ratio", constant rate and linear decay to 0, terminal reward.',
        ),
    ),
    quick={"seeds": 1, "panels": _QUICK_LENGTHS, "changes": QUICK_TERMINAL},
    metric_labels=EXACT_MATCH,
)

EXPERIMENTS = (VOCABULARY, VARIATIONS, TERMINAL, ABLATIONS, ANCHOR)
