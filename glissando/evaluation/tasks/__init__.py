"""Tasks for lm-eval that need no network: a YAML file each, and their documents as JSONL.

The documents are held-out stories of the built-in generator: `python -m research.stories.documents` writes them anew,
byte for byte.
"""

from pathlib import Path

#: where they lie
FOLDER = Path(__file__).parent


def bundled() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
