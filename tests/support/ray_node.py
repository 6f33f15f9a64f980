"""Ray on this machine, for tests."""

from __future__ import annotations


def start_ray(tries: int = 3) -> None:
    """Start it; Ray gives itself 30 s, which is too little on a busy machine."""
    import ray

    try:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000)
    except Exception:
        ray.shutdown()
        if tries == 1:
            raise
        start_ray(tries - 1)
