"""JSON Lines: one object a line, read at random through an index of byte offsets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_gspo.config.schema import DataConfig
from megatron_gspo.data.files import to_prompt
from megatron_gspo.data.prompt import Prompt


class JsonlRows:
    """The rows of a JSON Lines file. Every line is checked once, as the file is opened, so that a bad one stops a run
    before it starts; only line numbers and offsets stay in memory. Blank lines are allowed."""

    def __init__(self, config: DataConfig, *, responses: bool = False):
        assert config.path is not None, "validation requires data.path for a file source"
        self._config = config
        self._responses = responses
        self._path = Path(config.path)
        if not self._path.is_file():
            raise ValueError(f"data.path = '{self._path}': no such file")
        self._lines, self._offsets = self._index()
        if not len(self._offsets):
            raise ValueError(f"data.path = '{self._path}': the file holds no prompts")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Prompt:
        with self._path.open("rb") as file:
            file.seek(self._offsets[row])
            return self._parse(file.readline(), int(self._lines[row]))

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """Line numbers (from 1) and byte offsets of the lines that are not blank; both [rows] int64."""
        lines, offsets, offset = [], [], 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._parse(line, number)
                    lines.append(number)
                    offsets.append(offset)
                offset += len(line)
        return np.array(lines, dtype=np.int64), np.array(offsets, dtype=np.int64)

    def _parse(self, line: bytes, number: int) -> Prompt:
        place = f"{self._path}:{number}"
        try:
            row: Any = json.loads(line)
            if b"\\ud" in line.lower():  # half a surrogate pair, which JSON allows, is nothing that a tokenizer takes
                json.dumps(row, ensure_ascii=False).encode()
        except ValueError as error:  # a JSONDecodeError, UnicodeDecodeError or UnicodeEncodeError
            raise ValueError(f"{place}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected a JSON object, got {row!r:.80}")
        return to_prompt(row, self._config, place, responses=self._responses)
