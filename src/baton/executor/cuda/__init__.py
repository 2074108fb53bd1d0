"""The executor on a CUDA device. Needs triton; other code imports it only when a device is requested."""
