"""The trained policy on Megatron-Core. Importing this package makes Megatron importable without CUDA."""

from megatron_gspo.policy import cpu

cpu.install()
