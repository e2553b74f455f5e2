from razorctl.cli.app import run

run()
