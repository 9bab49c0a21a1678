"""The dashboard: a training's snapshots as a picture, live in the notebook and still in the saved file."""
