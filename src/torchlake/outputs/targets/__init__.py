"""Where rows are written; one file for each kind of output.

    folder          a local Parquet folder
    object_folder   a Parquet folder in an object store
    hub             a dataset repository on the Hugging Face Hub
    delta           a Delta table, local or in an object store
    iceberg         a table of an Iceberg catalog

Read `../target.py` first, then `../transaction.py`.
"""
