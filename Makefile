# `make demo` and `make test` do their own set-up; both are safe to run twice.
VENV := .venv
RUN := $(VENV)/bin
OURS := megatron_gspo tests tools bench # whatever else lies in the clone is the user's own
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo compare test check format clean

help:
	@echo 'make demo    set up, then train the demo MoE by GSPO on this machine (about 10 minutes after set-up)'
	@echo 'make compare set up, then GSPO, GRPO and SAPO from the same start and a report on them (about half an hour)'
	@echo 'make test    set up, then run the tests'
	@echo 'make check   ruff, mypy and the import rules'
	@echo 'make format  let ruff fix and format'
	@echo 'make clean   remove the virtual environment and what demo and compare made'

setup:
	@tools/setup_venv.sh

demo: setup
	@tools/demo.sh

compare: setup
	@tools/compare.sh

test: setup
	@$(RUN)/python -m pytest $(PYTEST_ARGS)

check: setup
	@$(RUN)/ruff check $(OURS) && $(RUN)/ruff format --check $(OURS)
	@echo 'mypy (half a minute the first time) ...'
	@$(RUN)/mypy
	@$(RUN)/python -m pytest -q tests/test_imports.py

format: setup
	@$(RUN)/ruff check --fix $(OURS) ; $(RUN)/ruff format $(OURS)

clean:
	rm -rf $(VENV) runs/compare runs/demo_sort runs/demo_sort_sft runs/demo_policy
