from runtime.cli.main import main

main()
