"""The tests mirror the package; plus parity, surface and layers."""
