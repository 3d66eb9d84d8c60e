"""Readers of the user's own files: image folders, arrays, tables, records and texts."""
