"""`terra bench SCRIPT`: the same script in plain eager TensorFlow and under Terra, compared.

A run's way through the modules:

    command   reads the arguments, runs the script in turns, ends in an exit code
    process   starts one child process and collects all that comes out of it
    child     the child's side: runs the script as `__main__`, reports its iterations
    channel   the messages that the child sends through a pipe of its own
    timing    step times from the starts of iterations
    printed   the numbers that a script printed, and whether two scripts printed the same
    verdict   what the runs add up to: agreement, speed, remarks
    display   all that the user sees
"""
