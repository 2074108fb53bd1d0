"""The executor on a CUDA device. Needs triton; nothing outside this folder imports it unless a device is asked for."""
