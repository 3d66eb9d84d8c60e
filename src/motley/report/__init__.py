"""The report: runs and studies as one self-contained HTML page."""
