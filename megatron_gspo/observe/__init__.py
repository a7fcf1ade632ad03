"""What a run tells: metrics on disk, a progress display, a table at the end."""

from megatron_gspo.observe.metrics_log import MetricsLog, read_metrics
from megatron_gspo.observe.phases import Phases
from megatron_gspo.observe.progress import Progress
from megatron_gspo.observe.summary import summary_table

__all__ = ["MetricsLog", "Phases", "Progress", "read_metrics", "summary_table"]
