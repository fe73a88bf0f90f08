"""Seams: the tier's counters in /server_info and on /metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sglang.srt.managers.scheduler import Scheduler

from .hooks import Seam
from .pool import Dsv4xTokenToKVPool

HELP = {
    "selected": "C4 entries that decode steps selected.",
    "hits": "Selected entries that were in a hot slot.",
    "misses": "Selected entries that were fetched from the host store.",
    "pending": "Selected entries that another query's fetch was already bringing.",
    "fetched_entries": "Entries fetched, neighbours of the same unit included.",
    "bytes_to_device": "Bytes of C4 rows read from the host store.",
    "bytes_to_host": "Bytes of C4 rows written through to the host store.",
    "replaced": "Hot units replaced.",
    "prefill_hot": "C4 rows that prefill read from hot slots.",
    "prefill_host": "C4 rows that prefill read from the host store.",
}


def counters_of(pool: Dsv4xTokenToKVPool) -> dict[str, int]:
    """Totals by name; empty when the tier is off."""
    if pool.tier is None:
        return {}
    counted = pool.tier.counters()
    return {name: int(getattr(counted, name)) for name in HELP}


def describe(pool: Dsv4xTokenToKVPool) -> dict[str, Any]:
    """What /server_info shows under `dsv4x`."""
    shown: dict[str, Any] = {
        "tier": pool.config.tier,
        "config": asdict(pool.config),
        "counters": counters_of(pool),
    }
    if pool.tier is not None:
        shape = pool.tier.shape
        shown["bytes"] = {"host": shape.host_bytes, "hot": shape.hot_bytes, "tables": shape.table_bytes}
        shown["hot_entries"], shown["smallest_hot_entries"] = shape.slots, shape.bound
    points = pool.resume_points
    shown["resume_points"] = {
        "points": len(points),
        "capacity": points.capacity,
        "point_bytes": points.point_bytes,
        **points.counters()._asdict(),
    }
    return shown


def pools_of(scheduler: Scheduler) -> dict[str, dict[str, int]]:
    """Tokens (or request slots) of SGLang's pools: total, free, and held by the radix tree (evictable, protected).

    When nothing runs, the parts add up to the total; SGLang's leak check stops the server otherwise.
    """
    allocator, tree, requests = (
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.req_to_token_pool,
    )
    return {
        "full": {
            "total": allocator.size_full,
            "free": allocator.full_available_size(),
            "evictable": tree.full_evictable_size(),
            "protected": tree.full_protected_size(),
        },
        "swa": {
            "total": allocator.size_swa,
            "free": allocator.swa_available_size(),
            "evictable": tree.swa_evictable_size(),
            "protected": tree.swa_protected_size(),
        },
        "requests": {"total": requests.size, "free": requests.available_size()},
    }


def add_to_internal_state(result: Any, self: Scheduler, *_: Any, **__: Any) -> Any:
    pool = self.token_to_kv_pool_allocator.get_kvcache()
    if isinstance(pool, Dsv4xTokenToKVPool):
        result.internal_state["dsv4x"] = {**describe(pool), "pools": pools_of(self)}
    return result


class TierGauges:
    """The counters as Prometheus gauges named sglang:dsv4x_*, in SGLang's multi-process registry."""

    def __init__(self, labels: dict[str, str], pool: Dsv4xTokenToKVPool) -> None:
        # Importing prometheus_client before SGLang has set PROMETHEUS_MULTIPROC_DIR would bind the wrong registry.
        from prometheus_client import Gauge

        self._labels, self._pool = labels, pool
        self._gauges = {
            name: Gauge(f"sglang:dsv4x_{name}", text, labelnames=list(labels), multiprocess_mode="mostrecent")
            for name, text in HELP.items()
        }

    def publish(self) -> None:
        for name, value in counters_of(self._pool).items():
            self._gauges[name].labels(**self._labels).set(value)


def attach_gauges(result: None, self: Scheduler, *_: Any, **__: Any) -> None:
    """After the scheduler is built: its metrics collector, where there is one, also publishes the tier."""
    pool = self.token_to_kv_pool_allocator.get_kvcache()
    collector = self.metrics_collector
    if collector is not None and isinstance(pool, Dsv4xTokenToKVPool) and pool.tier is not None:
        collector.dsv4x_gauges = TierGauges(collector.labels, pool)


def publish_gauges(result: None, self: Any, *_: Any, **__: Any) -> None:
    gauges = getattr(self, "dsv4x_gauges", None)
    if gauges is not None:
        gauges.publish()


SEAMS = [
    Seam(
        path="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        signature="(self, recv_req)",
        kind="after",
        reason="tier counters in /server_info",
        hook=add_to_internal_state,
    ),
    Seam(
        path="sglang.srt.managers.scheduler.Scheduler.init_metrics_collector",
        signature="(self, tp_rank, pp_rank, dp_rank)",
        kind="read",
        reason="makes the collector that publishes the tier's gauges",
    ),
    Seam(
        path="sglang.srt.managers.scheduler.Scheduler.__init__",
        signature="(self, server_args, port_args, gpu_id, tp_rank, moe_ep_rank, pp_rank, attn_cp_rank, moe_dp_rank, "
        "dp_rank)",
        kind="after",
        reason="tier gauges on /metrics",
        hook=attach_gauges,
    ),
    Seam(
        path="sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        signature="(self, stats)",
        kind="after",
        reason="tier gauges on /metrics are set when SGLang sets its own",
        hook=publish_gauges,
    ),
]
