"""The report: runs and studies as one HTML page that needs nothing but a browser."""
