import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """Numbers measured from the author's code, see their `source`."""
    return json.loads((Path(__file__).parent / "data" / "reference.json").read_text())
