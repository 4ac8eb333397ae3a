"""Write the README's two blocks of shell commands, and its Python example, to files."""

import re
import sys
from pathlib import Path


def main(readme: str, out: str) -> None:
    text = Path(readme).read_text(encoding="utf-8")

    def blocks(language: str, expected: int) -> list[str]:
        pattern = rf"^```{language}\n(.*?)^```$"
        found = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
        if len(found) != expected:
            sys.exit(f"{readme}: expected {expected} blocks of {language}, found {len(found)}.")
        return found

    for number, block in enumerate(blocks("bash", 2), 1):
        (Path(out) / f"command-{number}.sh").write_text(block, encoding="utf-8")
    (Path(out) / "example.py").write_text(blocks("python", 1)[0], encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
