"""Studies: methods compared over data sets and seeds, such as papers' tables and figures."""
