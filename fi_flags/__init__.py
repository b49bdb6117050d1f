"""fi_flags: a feature flag for FlashInfer's persistent autotune cache."""

__version__ = "0.1.0"
