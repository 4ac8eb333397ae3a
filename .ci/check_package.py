"""Check a built source distribution and wheel: that they hold what they should and nothing else.

That includes the version, which CITATION.cff must name too.

The wheel is unpacked and used from there, so that nothing of the checkout helps.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

MAIN_JOB = """
import sklearn_mr2
from sklearn_mr2.datasets import load_fashion_mnist_features

assert sklearn_mr2.__file__.startswith({folder!r}), sklearn_mr2.__file__
X, y = load_fashion_mnist_features(return_X_y=True)
assert sklearn_mr2.MR2Classifier(tol=1e-3).fit(X[:500], y[:500]).score(X, y) > 0.6
"""


def main(folder: str) -> None:
    (sdist,) = Path(folder).glob("*.tar.gz")
    (wheel,) = Path(folder).glob("*.whl")
    version = wheel.name.split("-")[1]
    cited = re.search(r"^version: (\S+)$", Path("CITATION.cff").read_text(encoding="utf-8"), re.M)
    if ".dev" not in version and (not cited or version != cited[1]):
        sys.exit(f"CITATION.cff does not name {version}, the version of the package.")
    package = {p.as_posix() for p in Path("sklearn_mr2").rglob("*.py")} | {"sklearn_mr2/py.typed"}
    package |= {p.as_posix() for p in Path("sklearn_mr2/datasets/data").iterdir()}

    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        compare(wheel.name, files, package)
        with tempfile.TemporaryDirectory() as unpacked:
            archive.extractall(unpacked)
            command = [sys.executable, "-c", MAIN_JOB.format(folder=unpacked)]
            subprocess.run(command, cwd=unpacked, check=True)

    with tarfile.open(sdist) as archive:
        paths = [member.name.split("/", 1)[-1] for member in archive if member.isfile()]
    tests = {p.as_posix() for p in Path("tests").rglob("*.*") if "__pycache__" not in p.parts}
    tests = {path for path in tests if not path.startswith("tests/benchmarks")}
    around = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md"}
    around |= {"RELEASING.md", "constraints.txt", "noxfile.py", "pyproject.toml", "MANIFEST.in"}
    made = {"PKG-INFO", "setup.cfg"}
    files = {path for path in paths if ".egg-info/" not in path} - made
    compare(sdist.name, files, package | {p for p in tests if Path(p).is_file()} | around)


def compare(name: str, found: set[str], expected: set[str]) -> None:
    for title, files in (("lacks", expected - found), ("should not hold", found - expected)):
        if files:
            sys.exit(f"{name} {title}: {', '.join(sorted(files))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
