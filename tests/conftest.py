"""Megatron is patched and imported before any test module touches it."""

from tests import ranks  # noqa: F401
