"""The `[data.files]` table: how the user's own files are read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from motley.settings import FilePath, Settings

#: The kinds of input that can be asked for, and "auto".
InputKind = Literal["auto", "image", "signal", "tokens", "table", "array", "text"]


class FileSettings(Settings):
    """How the user's own files are read, for data.name = "files"."""

    lasting = ()

    format: Literal["auto", "images", "npz", "csv", "parquet", "jsonl", "text", "huggingface"] = (
        "auto"
    )
    """The format of data.path. auto: by its ending, and for a folder by its content. images: a
    folder of images per class. huggingface: a folder written by `save_to_disk`.
    """
    test: FilePath = ""
    """The test file or folder, in the same format; empty: the test part of data.path, if it has
    one, else `test_fraction` of the examples.
    """
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """The fraction of the examples that is held out for testing, if there is no test part: of every
    client, or of every class if there are no natural clients.
    """
    test_seed: int = Field(default=0, ge=0)
    """The seed that draws the held-out examples. It is not the run's seed, so that all runs are
    tested on the same examples.
    """
    task: Literal["auto", "classification", "regression", "next-token"] = "auto"
    """auto: regression if the target column has fractional numbers, next-token for plain text, else
    classification.
    """
    inputs: InputKind = "auto"
    """The kind of the inputs. auto: by their shape and type. text: the characters of one text
    column, cut or padded to `sequence_length`.
    """
    target: str = ""
    """The column with the labels, or with the numbers of a regression; empty: the one called
    target, label, labels, class or y.
    """
    client: str = ""
    """The column that names the client of each row, for data.partition.name = "natural"; empty: no
    natural clients, except if there is one folder or one text file per client.
    """
    features: tuple[str, ...] = ()
    """The columns that the model sees; empty: all but target and client."""
    drop: tuple[str, ...] = ()
    """Columns that are not used."""
    categories: tuple[str, ...] = ()
    """Columns of categories although their values are numbers. Columns of words are categories
    anyway.
    """
    classes: tuple[str, ...] = ()
    """The names of all classes, in the order of their numbers; empty: those that occur, sorted. A
    node whose files may lack some classes needs it.
    """
    delimiter: str = Field(default="", max_length=1)
    """The character between the columns of a CSV file; empty: the most frequent one of comma,
    semicolon, tab and | in the first line.
    """
    header: bool = True
    """The first line of a CSV file has the columns' names. false: they are called 1, 2, 3, ..."""
    encoding: Literal["auto", "utf-8", "utf-16", "latin-1", "cp1252"] = "auto"
    """The encoding of text files. auto: UTF-16 if the file starts with its mark, else UTF-8."""
    missing: Literal["refuse", "drop", "mean"] = "refuse"
    """Missing values in a table. refuse: an error. drop: leave out rows with missing values. mean:
    use the column's mean over the training rows, and for categories a category of their own.
    """
    missing_marks: tuple[str, ...] = ("", "NA", "N/A", "NaN", "null", "?")
    """Texts that stand for a missing value, in upper or lower case."""
    standardize: bool = True
    """Scale each column of numbers to mean 0 and standard deviation 1 over the training rows."""
    resize: int = Field(default=0, ge=0, le=4096)
    """Side in pixels to which images of different sizes are scaled; 0: such images are refused."""
    sequence_length: int = Field(default=80, ge=1, le=100_000)
    """The number of characters in an example, for plain text and for inputs = "text"."""

    @field_validator("delimiter")
    @classmethod
    def _delimiter_separates(cls, value: str) -> str:
        if value in ('"', "\r", "\n", " "):
            raise ValueError("should be a character such as ',' or ';', or a tab")
        return value
