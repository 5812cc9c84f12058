"""The distribution holds what it must and nothing twice, and importing it stays cheap."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command and returns its output; a failure shows both streams."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def repository_files() -> list[Path]:
    """What a clone would hold: files that git tracks, or would track with the next `git add`."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    # The checkout may belong to another user (containers), which git refuses unless told otherwise.
    listing = run(
        *("git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"), cwd=ROOT
    )
    return [path for name in listing.split("\0") if name and ((path := ROOT / name).exists() or path.is_symlink())]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist built from the files of a clone."""
    clone = tmp_path_factory.mktemp("clone")
    for path in repository_files():
        target = clone / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target, follow_symlinks=False)
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, cwd=clone)
    assert len(list(dist.glob("*.tar.gz"))) == 1
    (built,) = dist.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_package_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"tpo_gym"}
    assert {"tpo_gym/py.typed", "tpo_gym/agents/__init__.py", "tpo_gym/envs/__init__.py"} <= set(names)
    assert len([name for name in names if name.startswith("tpo_gym/envs/data/")]) >= 1

    package = {str(path.relative_to(ROOT)) for path in repository_files() if ROOT / "tpo_gym" in path.parents}
    assert {name for name in names if name.startswith("tpo_gym/")} == package


@pytest.mark.slow
def test_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # The dependencies are lent by the environment of the tests. A path file appends to `sys.path` without running the
    # path files over there, so that an editable install of this package stays out.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    lent = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (Path(site) / "lent.pth").write_text("\n".join(lent) + "\n")

    program = """
import gymnasium, tpo_gym
observation, _ = gymnasium.make("tpo_gym/MNISTBandit-v0").reset(seed=0)
assert 0 < observation.sum() and observation.max() <= 1
from tpo_gym import TPO
print(tpo_gym.__file__)
"""
    assert home in Path(run(python, "-c", program, cwd=tmp_path).strip()).parents


@pytest.fixture(scope="module")
def modules_after_import() -> dict[str, list[str]]:
    """The modules that a fresh process holds after `import gymnasium`, and those that `import tpo_gym` adds."""
    program = """
import json, sys
import gymnasium
before = set(sys.modules)
import tpo_gym
print(json.dumps({"gymnasium": sorted(before), "tpo_gym": sorted(set(sys.modules) - before)}))
"""
    return json.loads(run(sys.executable, "-c", program, cwd=ROOT))


@pytest.mark.parametrize("heavy", ["torch", "stable_baselines3", "matplotlib", "tensorboard", "rich"])
def test_import_leaves_heavy_packages_alone(modules_after_import: dict[str, list[str]], heavy: str) -> None:
    assert heavy not in modules_after_import["gymnasium"] + modules_after_import["tpo_gym"]


def test_import_adds_only_ourselves_and_the_standard_library(modules_after_import: dict[str, list[str]]) -> None:
    """What keeps `import tpo_gym` as quick as `import gymnasium`, said without a clock."""
    added = {name.split(".")[0] for name in modules_after_import["tpo_gym"]}
    known = {name.split(".")[0] for name in modules_after_import["gymnasium"]}
    assert added - known - set(sys.stdlib_module_names) == {"tpo_gym"}


@pytest.mark.parametrize("name", ["agents", "envs"])
def test_top_level_links_point_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("tpo_gym") / name
    assert (link / "__init__.py").is_file()


def test_versions_agree() -> None:
    def first(pattern: str, file: str) -> str:
        found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert found, f"no version in {file}"
        return found[1]

    version = first(r'^__version__(?:: \w+)? = "(.+)"$', "tpo_gym/__init__.py")
    assert first(r"^version: (.+)$", "CITATION.cff") == version
    assert first(r"^## \[(\d.+?)\]", "CHANGELOG.md") == version


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    machine_path = re.compile(r"(?<![\w.~$)}\]-])/(?:work|tmp|home|root|Users)/\w")
    hits = []
    for path in repository_files():
        if path.is_symlink() or path.is_dir():
            continue
        data = path.read_bytes()
        if b"\0" in data[:8192]:  # binary
            continue
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), start=1):
            if machine_path.search(line):
                hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert hits == []
