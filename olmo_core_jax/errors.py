"""Exit codes of every job, and the errors that lead to them. The one place where they are documented.

| code | name            | meaning                                                        | what the launcher does     |
|------|-----------------|----------------------------------------------------------------|----------------------------|
| 0    | OK              | the stage's result.json is written and valid                   | goes on                    |
| 1    | CRASH           | an unforeseen exception; the log has the traceback              | retries, counted           |
| 2    | USER_ERROR      | bad input: the message names the file or field and the remedy   | stops; no retry can help   |
| 42   | PREEMPTED       | told to stop (SIGTERM); a checkpoint is saved or intact         | starts again, not counted  |
| 43   | LOCKED          | another live process owns this run root                         | stops; two trainers never  |
| 44   | DIVERGED        | several non-finite updates in a row; last good checkpoint named | stops                      |
"""

OK, CRASH, USER_ERROR, PREEMPTED, LOCKED, DIVERGED = 0, 1, 2, 42, 43, 44
FINAL = (USER_ERROR, LOCKED, DIVERGED)
"""What no new start can help."""


class JobError(Exception):
    """An ending with a documented exit code and a message for people (no traceback is shown)."""

    exit_code = CRASH


class UserError(JobError):
    """Bad input. The message names the file, field or tensor and says what to do."""

    exit_code = USER_ERROR


class Preempted(JobError):
    """The job was told to stop and has left an intact checkpoint behind."""

    exit_code = PREEMPTED


class Locked(JobError):
    """Another live process is working on the same run root and stage."""

    exit_code = LOCKED


class Diverged(JobError):
    """Training produced several non-finite updates in a row."""

    exit_code = DIVERGED
