"""Every name that users and their tools rely on, in files of names: moves of code change none of them.

`python -m tests.golden` writes the files again. A name that is gone breaks a dashboard, a script or a
configuration; a name that is new is a line of the diff for the reviewer.
"""
