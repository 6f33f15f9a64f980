"""NVIDIA's RadixTree (ai-dynamo-runtime) under the prefix index benchmark: `python prefix_peer.py SHAPE ENTRIES`.

Standard library and the peer alone, so that it runs in an interpreter of its own. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import prefix_data as data  # the package may not be importable from the peer's interpreter


def main() -> None:
    try:
        from dynamo._core import RadixTree
    except ImportError as error:
        sys.exit(f"ai-dynamo-runtime is not installed here: {error}")
    shape = next(each for each in data.shapes(int(sys.argv[2])) if each.name == sys.argv[1])
    asked = [list(query) for query in data.queries(shape)]
    tree = RadixTree()
    before, spent = data.resident_bytes(), 0.0
    for number, (endpoint, hashes, known) in enumerate(data.prompts(shape)):
        blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes[known:]]
        event = {
            "event_id": number,
            "data": {"stored": {"parent_hash": hashes[known - 1] if known else None, "blocks": blocks}},
            "dp_rank": 0,
        }
        encoded = json.dumps(event).encode()
        start = time.process_time()
        tree.apply_event(endpoint, encoded)
        spent += time.process_time() - start
    start = time.process_time()
    found = tree.find_matches(asked[0]).scores  # also waits for its thread to have applied everything
    spent += time.process_time() - start
    memory = data.resident_bytes() - before
    assert max(found.values()) == shape.blocks, found
    print(
        json.dumps(
            {
                "blocks_per_s": shape.stored / spent,
                "bytes_per_entry": memory / shape.stored,
                **data.time_lookups(tree.find_matches, asked),
            }
        )
    )


if __name__ == "__main__":
    main()
