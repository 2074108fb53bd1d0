"""The names under which metrics are shown: ours, vLLM's, or both. Owns the one table from ours to vLLM's.

What has no counterpart there keeps our name. `named_metrics` applies the table. Imports no server, for the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

ENGINE = "0"
"""vLLM numbers the engines of a server with data parallelism; here a server has one."""

COUNTERPARTS: Mapping[str, tuple[str, ...]] = {
    "baton_num_requests_running": ("vllm:num_requests_running",),
    "baton_num_requests_waiting": ("vllm:num_requests_waiting",),
    "baton_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "baton_cache_config": ("vllm:cache_config",),
    "baton_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "baton_prefix_cache_hits": ("vllm:prefix_cache_hits",),
    "baton_num_preemptions": ("vllm:num_preemptions",),
    "baton_prompt_tokens": ("vllm:prompt_tokens",),
    "baton_generation_tokens": ("vllm:generation_tokens",),
    "baton_request_success": ("vllm:request_success",),
    "baton_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "baton_accepted_draft_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "baton_iteration_tokens_total": ("vllm:iteration_tokens_total",),
    "baton_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "baton_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "baton_time_per_output_token_seconds": ("vllm:time_per_output_token_seconds",),
    "baton_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "baton_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "baton_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "baton_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "baton_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "baton_request_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "baton_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "baton_request_generation_tokens": ("vllm:request_generation_tokens",),
    "baton_request_max_num_generation_tokens": ("vllm:request_max_num_generation_tokens",),
    "baton_request_params_n": ("vllm:request_params_n",),
    "baton_request_params_max_tokens": ("vllm:request_params_max_tokens",),
}
"""Our family → vLLM's; a second name is the one that earlier releases of vLLM and boards for them use. Without the suffixes
`_total` of counters and `_info`."""
DROPPED = {"baton_num_preemptions": frozenset({"cause", "policy"})}
"""Labels that vLLM's family does not have: its samples are summed over them, and ours is shown as well."""
REASONS = {"pd_reschedule": "abort", "constraint_failed": "error"}
"""Values of `finished_reason` that vLLM does not have."""


class MetricNames(StrEnum):
    BATON = "baton"
    VLLM = "vllm"
    BOTH = "both"
