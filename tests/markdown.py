"""The one parser of the documents' code blocks."""

import re
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.M | re.S)
Block = namedtuple("Block", "mark language body")  # mark: of the comment in the line above, or ""


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text, *languages):
    """The fenced blocks of a text, or those in these languages."""
    found = [Block(*parts) for parts in BLOCK.findall(text)]
    return [block for block in found if not languages or block.language in languages]


def marked(text, kind):
    """{name: block} of the blocks below a comment `<!-- kind: name -->`."""
    pairs = [(block.mark.partition(": "), block) for block in blocks(text)]
    return {name: block for (of, _, name), block in pairs if of == kind}


def without_blocks(text):
    return re.sub(BLOCK.pattern.partition(")?")[2], "", text, flags=re.M | re.S)
