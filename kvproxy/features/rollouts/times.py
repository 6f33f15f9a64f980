"""Time that changes of all engines may take, in seconds."""

#: Of each engine for a call, unless the request states another.
CALL_S = 60
#: Weights of many gigabytes take minutes to load.
MAX_CALL_S = 3600
#: Until an answer has come back from the process that called.
ANSWER_S = 5
