"""Write each block of shell commands in the README to a file of its own."""

import re
import sys
from pathlib import Path


def main(readme: str, out: str) -> None:
    text = Path(readme).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash|sh|shell)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if len(blocks) != 2:
        sys.exit(f"{readme}: expected 2 blocks of shell commands, found {len(blocks)}.")
    for number, block in enumerate(blocks, 1):
        (Path(out) / f"command-{number}.sh").write_text(block, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
