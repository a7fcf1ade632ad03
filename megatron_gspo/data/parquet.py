"""Parquet: rows read at random, a few row groups in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_gspo.config.schema import DataConfig
from megatron_gspo.data.files import to_prompt
from megatron_gspo.data.prompt import Prompt

CACHED_ROW_GROUPS = 8


class ParquetRows:
    """The rows of a Parquet file. A shuffled epoch jumps between row groups: small ones (thousands of rows)
    read fastest. Every prompt, and with `responses` every response, is checked once, as the file is opened."""

    def __init__(self, config: DataConfig, *, responses: bool = False):
        assert config.path is not None, "validation requires data.path for a file source"
        self._config = config
        self._responses = responses
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
        self[0]  # a missing column: the message lists those that there are
        self._check()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> Prompt:
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        table = self._row_group(group).slice(row - int(self._starts[group]), 1)
        return self._prompt(table.to_pylist()[0], row)

    def _check(self) -> None:
        columns = [self._config.prompt_key, *([self._config.response_key] if self._responses else [])]
        batches = self._file.iter_batches(columns=columns)
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            self._prompt(row, number)

    def _prompt(self, values: Mapping[str, Any], row: int) -> Prompt:
        return to_prompt(values, self._config, f"{self._path}:row {row}", responses=self._responses)
