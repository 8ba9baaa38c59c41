"""The programs of the table, a subject a file. See the package above for how to add one."""
