"""The meeting: how the processes of a job find each other and who they are.

Process 0 listens, as the host; the others are its guests. Who has called and has not
proved yet to know the job's secret is a stranger.
"""
