"""The ``sklearn-mr2`` command."""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ._probe import RULES, InputError, Settings, n_fits, run_probe
from ._probe.files import FILES, can_plot, new_folder, write_files
from ._probe.job import DEFAULT_CS
from ._probe.text import header, printable, results
from ._version import __version__
from .datasets import load_embeddings, load_fashion_mnist_features

Number = TypeVar("Number", int, float)

_DESCRIPTION = """\
Fit two linear probes to the same embeddings, one by cross-entropy and one by
MR2, and compare them class by class on a part of the data held out for it.
Both have the same budget: C is tuned over the same values and folds."""

_EPILOG = """\
FILE holds one embedding and one label a sample:
  .npz            arrays X and y (or features/embeddings/data, labels/target)
  .npy            the embeddings; labels beside it as NAME_labels.npy, or given
                  by --labels-file
  .csv, .parquet  one column of labels named label, target, class or y, or given
                  by --label; all other columns are features

examples:
  sklearn-mr2 probe                               the bundled data
  sklearn-mr2 probe clip.parquet --label breed    your own
  sklearn-mr2 probe clip.npz --rule error --out results/clip"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process by default.

    Returns
    -------
    int
        Exit code: 0, or 2 for input that cannot be used, or 130 if interrupted. Wrong usage raises
        SystemExit with code 2, as argparse does.
    """
    arguments = _parser().parse_args(argv)
    try:
        _probe(arguments)
    except KeyboardInterrupt:
        print("sklearn-mr2: interrupted, nothing was written", file=sys.stderr)
        return 130
    except InputError as error:
        return _refuse(str(error))
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _refuse(f"{where}{error.strerror or error}")
    return 0


def _refuse(reason: str) -> int:
    print(f"sklearn-mr2: {printable(reason)}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    share = _number(float, lambda value: 0 < value < 1, "a number between 0 and 1")
    positive = _number(float, lambda value: 0 < value < math.inf, "a positive number")
    parser = argparse.ArgumentParser(
        prog="sklearn-mr2", description="Probes that treat classes more equally."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    probe = commands.add_parser(
        "probe",
        help="compare a cross-entropy and an MR2 probe of embeddings, class by class",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = probe.add_argument_group("data")
    data.add_argument(
        "file", metavar="FILE", nargs="?", type=Path,
        help="embeddings with labels; by default bundled features of Fashion-MNIST",
    )  # fmt: skip
    data.add_argument("--label", metavar="NAME", help="column or .npz array of the labels")
    data.add_argument(
        "--labels-file", metavar="FILE", type=Path,
        help="labels of an .npy file: .npy, or .csv or .txt with one a line",
    )  # fmt: skip
    data.add_argument(
        "--test-size", metavar="SHARE", type=share, default=Settings.test_size,
        help="share of the samples held out for testing (default: %(default)s)",
    )  # fmt: skip
    data.add_argument(
        "--seed", metavar="N", type=_whole(0, 2**32 - 1), default=Settings.seed,
        help="seed of the split, the folds and the models (default: %(default)s)",
    )  # fmt: skip
    tuning = probe.add_argument_group("tuning, the same for both models")
    tuning.add_argument(
        "--Cs", metavar="C", type=positive, nargs="+", default=DEFAULT_CS,
        help="inverse strengths of the L2 penalty to try (default: "
        f"{len(DEFAULT_CS)} values from {DEFAULT_CS[0]:g} to {DEFAULT_CS[-1]:g})",
    )  # fmt: skip
    tuning.add_argument(
        "--cv", metavar="K", type=_whole(2), default=Settings.cv,
        help="folds of cross-validation (default: %(default)s)",
    )  # fmt: skip
    tuning.add_argument(
        "--repeats", metavar="N", type=_whole(1), default=Settings.repeats,
        help="draw the folds N times, for a steadier choice (default: %(default)s)",
    )  # fmt: skip
    tuning.add_argument(
        "--rule", choices=tuple(RULES), default=Settings.rule,
        help="MR2's margins. paper: from the spread of the features, dividing the logits. error: "
        "from the classes' cross-validated errors, subtracted; lifts the hardest classes more, "
        "and takes longer (default: %(default)s)",
    )  # fmt: skip
    output = probe.add_argument_group("output")
    output.add_argument(
        "--out", metavar="FOLDER", type=Path, default=Path("probe-results"),
        help="where to write the results (default: %(default)s)",
    )  # fmt: skip
    output.add_argument(
        "--force", action="store_true", help="replace the results of an earlier run"
    )
    output.add_argument("--quiet", action="store_true", help="show no progress")
    return parser


def _probe(arguments: argparse.Namespace) -> None:
    start = time.perf_counter()
    settings = Settings(
        test_size=arguments.test_size,
        seed=arguments.seed,
        Cs=tuple(sorted(set(arguments.Cs))),
        cv=arguments.cv,
        repeats=arguments.repeats,
        rule=arguments.rule,
    )
    with new_folder(arguments.out, force=arguments.force) as folder:
        X, y, source = _load(arguments)
        _say(header(source, X.shape, len(np.unique(y)), settings))
        with _progress(n_fits(settings), arguments.quiet) as advance:
            outcome = run_probe(X, y, settings, advance)
        write_files(folder, outcome, source, time.perf_counter() - start)
    _say(f"{results(outcome)}\n\n{_written(arguments.out)}")


def _say(text: str) -> None:
    """Print, with "?" for characters of classes' names that the terminal cannot show."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


def _load(arguments: argparse.Namespace) -> tuple[NDArray, NDArray, str]:
    if arguments.file is None:
        for name in ("label", "labels_file"):
            if getattr(arguments, name) is not None:
                option = "--" + name.replace("_", "-")
                raise InputError(f"{option} goes with a FILE; name one, or leave {option} out")
        X, y = load_fashion_mnist_features(return_X_y=True)
        return X, y, "Fashion-MNIST features (bundled)"
    try:
        X, y, _ = load_embeddings(
            arguments.file, label=arguments.label, labels_path=arguments.labels_file
        )
    except (ImportError, ValueError, FileNotFoundError) as error:
        raise InputError(_in_options(str(error))) from error
    # Half precision is for storage; sums over it overflow.
    return X.astype("float32") if X.dtype == "float16" else X, y, arguments.file.name


def _in_options(message: str) -> str:
    """Name the command's options where the reader's message names its arguments."""
    message = re.sub(r"\blabels_path\b", "--labels-file", message)
    return re.sub(r"\b(give|instead of) label\b", r"\1 --label", message)


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[], object]]:
    """Show a progress bar on stderr if someone may be watching."""
    watched = not quiet and sys.stderr.isatty()
    with tqdm(total=total, desc="Fitting", unit="fit", leave=False, disable=not watched) as bar:
        yield bar.update


def _written(out: Path) -> str:
    lines = [f"Written to {out}/"]
    lines += [f"  {name:<16}{what}" for name, what in FILES.items() if (out / name).exists()]
    if not can_plot():
        lines.append("  no figure, for want of matplotlib: pip install 'sklearn-mr2[plot]'")
    path = str(out / "model.joblib")
    lines.append(f"To use the model: joblib.load({path!r}).predict(X)")
    return "\n".join(lines)


def _number(
    convert: Callable[[str], Number], accept: Callable[[Number], bool], what: str
) -> Callable[[str], Number]:
    """Return an argument type that takes only some numbers and says which."""

    def parse(text: str) -> Number:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not accept(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


def _whole(low: int, high: float = math.inf) -> Callable[[str], int]:
    limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
    return _number(int, lambda value: low <= value <= high, f"a whole number {limits}")
