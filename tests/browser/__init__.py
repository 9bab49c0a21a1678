"""Tests in a real JupyterLab, driven through a headless Chromium as a person would drive it."""
