"""The checks of the package, each in an environment of its own: `nox`, or `nox -s NAME`.

`nox -l` lists them. Where everything is installed already, `nox --no-venv --no-install -s NAME`
runs the commands alone; that is how `.ci/run` does it.
"""

import shutil
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
# In all environments, because other builds can be gigabytes large.
TORCH = next(line for line in CONSTRAINTS if line.startswith("torch=="))


def install(session: nox.Session, extra: str) -> None:
    """Install the package with the versions that it is developed with."""
    session.install("-c", "constraints.txt", "-e", f".[{extra}]")


def run_tests(session: nox.Session) -> None:
    """Run the tests, or what is asked for after `--`."""
    session.run("python", "-m", "pytest", "-q", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Lint, and check the format."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types."""
    install(session, "test")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests."""
    install(session, "test")
    run_tests(session)


@nox.session
def doctests(session: nox.Session) -> None:
    """Run the examples in docstrings."""
    install(session, "test")
    session.run("python", "-m", "pytest", "-q", "--doctest-modules", "sklearn_mr2")


@nox.session
def oldest(session: nox.Session) -> None:
    """Run the tests with the oldest versions that pyproject.toml allows, torch apart."""
    needed = list(PROJECT["dependencies"])
    for extra in ("plot", "distributed", "dask", "export", "test"):
        needed += EXTRAS[extra]
    # Tools of other sessions, and torch.
    apart = ("mypy", "ruff", "sklearn-mr2", "torch")
    needed = [r for r in needed if not r.startswith(apart) and "stubs" not in r]
    pinned = [r.replace(">=", "==") for r in needed]
    session.install(TORCH, *pinned)
    session.install("--no-deps", "-e", ".")
    run_tests(session)


@nox.session
def newest(session: nox.Session) -> None:
    """Run the tests with the newest versions of everything, torch apart."""
    session.install("--upgrade", "--upgrade-strategy", "eager", TORCH, "-e", ".[test]")
    run_tests(session)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device."""
    install(session, "test")
    session.run("python", "-c", "import torch; assert torch.cuda.is_available(), 'no CUDA device'")
    session.run("python", "-m", "pytest", "-q", "-m", "gpu", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Run the code of the user guide and build the site, warnings being errors."""
    install(session, "docs")
    build = ("sphinx-build", "-q", "-W", "--keep-going")
    session.run(*build, "-b", "doctest", "-D", "plot_gallery=0", "docs", "docs/_build/doctest")
    session.run(*build, "-b", "html", *session.posargs, "docs", "docs/_build/html")


@nox.session
def package(session: nox.Session) -> None:
    """Build the source distribution and the wheel into dist, and check what is in them."""
    install(session, "dev")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist")
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))
    session.run("python", ".ci/check_package.py", "dist")
