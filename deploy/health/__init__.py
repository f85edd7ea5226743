"""Whether a run is safe now, told from files alone: the store, its drift trace, shared memory, the disk.

believable lines of a trace that make sense
pulse      what the newest lines of a trace say of the job
memory     what the memory of this node holds
disk       how much room there is
facts      all of it, gathered at one moment
loss       what a failure would cost
check      a judgement of one thing; store_checks, job_checks, checks: all of them
verdict    the judgements in one sentence
"""
