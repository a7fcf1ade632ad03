"""Parquet: rows read at random, a few row groups in memory at a time."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_gspo.config.schema import DataConfig
from megatron_gspo.data.files import to_prompt
from megatron_gspo.data.prompt import Prompt

CACHED_ROW_GROUPS = 8


class ParquetRows:
    """The rows of a Parquet file. A shuffled epoch jumps between row groups: small ones (thousands of rows)
    read fastest."""

    def __init__(self, config: DataConfig):
        assert config.path is not None, "validation requires data.path for a file source"
        self._config = config
        self._path = Path(config.path)
        if not self._path.is_file():
            raise ValueError(f"data.path = '{self._path}': no such file")
        try:
            self._file = pq.ParquetFile(self._path, memory_map=True)
        except pa.ArrowInvalid as error:
            raise ValueError(f"data.path = '{self._path}': not a Parquet file: {error}") from None
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._row_group = lru_cache(maxsize=CACHED_ROW_GROUPS)(self._file.read_row_group)
        if not len(self):
            raise ValueError(f"data.path = '{self._path}': the file holds no prompts")
        self[0]  # a missing or mistyped column stops the run before it starts

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> Prompt:
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        table = self._row_group(group).slice(row - int(self._starts[group]), 1)
        return to_prompt(table.to_pylist()[0], self._config, f"{self._path}:row {row}")
