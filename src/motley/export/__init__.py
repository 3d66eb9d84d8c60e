"""Trained models outside a run: loading them, predicting with them, and exporting them to files."""
