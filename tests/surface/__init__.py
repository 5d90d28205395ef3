"""The documented names import, and importing the package is cheap."""
