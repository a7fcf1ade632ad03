"""GSPO and its kin on Megatron-Core: reinforcement learning for large mixture-of-experts policies."""
