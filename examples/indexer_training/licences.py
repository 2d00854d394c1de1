"""Which installed packages have a licence that allows training on them, by their metadata; and its text."""

import re
from importlib.metadata import Distribution
from pathlib import Path

# What a package must have, and what parts of it may have beside that.
ACCEPTED = {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "MIT", "PSF-2.0"}
_BESIDE = {"0BSD", "Apache-2.0 WITH LLVM-exception", "BSL-1.0", "CC0-1.0", "Zlib"}

# How metadata older than License-Expression calls them.
_CLASSIFIERS = {
    "License :: OSI Approved :: Apache Software License",
    "License :: OSI Approved :: BSD License",
    "License :: OSI Approved :: MIT License",
    "License :: OSI Approved :: Python Software Foundation License",
}
_WORDS = {
    "3-clause bsd",
    "apache",
    "apache 2.0",
    "apache 2.0 license",
    "apache license 2.0",
    "apache license, version 2.0",
    "apache software license",
    "apache-2.0",
    "bsd",
    "bsd 2-clause",
    "bsd 3-clause",
    "bsd license",
    "bsd-2-clause",
    "bsd-3-clause",
    "mit",
    "mit license",
    "new bsd",
    "psf",
    "psf-2.0",
}
_UMBRELLA = "License :: OSI Approved"
_TEXT_NAME = re.compile(r"(licen[cs]e|copying|notice)\b", re.IGNORECASE)


def licence_of(distribution: Distribution) -> str | None:
    """The package's licence in the words of its metadata, or None if one of those that it names is not accepted, or if
    it names none. Its License-Expression counts, else its classifiers, else its field License."""
    if distribution.read_text("METADATA") is None:  # as after an installation that was broken off
        return None
    metadata = distribution.metadata
    expression = metadata.get("License-Expression")
    if expression:
        named = {part.strip() for part in re.split(r"\bAND\b|\bOR\b|[()]", expression)} - {""}
        return expression if named <= ACCEPTED | _BESIDE and named & ACCEPTED else None
    classifiers = [name for name in metadata.get_all("Classifier", []) if name.startswith("License ::")]
    classifiers = [name for name in classifiers if name != _UMBRELLA]
    if classifiers:
        short = ", ".join(name.rpartition(" :: ")[2] for name in classifiers)
        return short if set(classifiers) <= _CLASSIFIERS else None
    words = (metadata.get("License") or "").strip()
    return words if words.lower() in _WORDS else None


def licence_text(distribution: Distribution) -> str:
    """The package's own licence and notices, not those of what it bundles; "" if it has none."""
    texts = []
    for path in sorted(distribution.files or [], key=str):
        *folders, name = path.parts
        of_package = folders and folders[0].endswith(".dist-info") and folders[1:] in ([], ["licenses"])
        file = Path(distribution.locate_file(path))
        if of_package and _TEXT_NAME.match(name) and file.is_file():
            texts.append(file.read_bytes().decode(errors="replace").strip())
    return "\n\n".join(texts)


def collected(texts: dict[str, str]) -> str:
    """One document of the licence texts of packages by their names; packages with the same text share it."""
    packages: dict[str, list[str]] = {}
    for name, text in texts.items():
        packages.setdefault(text, []).append(name)
    line = "=" * 100
    return "\n\n".join(f"{line}\n{', '.join(names)}\n{line}\n\n{text}" for text, names in packages.items()) + "\n"
