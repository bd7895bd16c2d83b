"""The long description of the package: README.md, without pictures and links into the repository.

An index of packages shows this text, but has none of these files.
"""

import re
from pathlib import Path

from setuptools import setup

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(r"^(?:<picture>.*</picture>|\[?!\[.*\))\n\n", "", text, flags=re.MULTILINE)
text = re.sub(r"\[([^]]+)\]\((?!https?://)[^)]+\)", r"\1", text)
setup(long_description=text, long_description_content_type="text/markdown")
